"""`gristmill run`: a whole training on this machine, without Docker. Works in a clone of the repository only.

The modules, in the order in which to read them:

    options        the command line and .env
    launcher       one run, from the checks to the summary
    checks         everything that can be checked before a service starts
    services       how Redis, API, model server, trainer and environment start
    warm_server    a model server that stays between commands
    model_command  `gristmill model`, and the model server of `gristmill try`
    local_run      the run, as the live view and the summary read it
    output         the live view, lines without a terminal, and merged logs
    processes      starts, watches and stops processes
    redis_server   finds a redis-server
    redis_acl      the permissions of the API in Redis
    secret_files   tokens and passwords of `make secure`

`redis_acl`, `secret_files` and this file import no packages: scripts/secure.py imports them on machines that have only
Docker.
"""
