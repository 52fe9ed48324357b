"""The program `gristmill`: runs in the terminal, the doctor, and jobs of a Slurm cluster.

The modules, in the order in which to read them:

    main      the command line
    commands  one function for each command
    status    `status` and `tail`: one run, from the API or from the run's files
    terminal  how the terminal shows a run
    doctor    checks of this machine and of a run
    page      the page, from the files of runs
    local     a training on this machine
    slurm     the batch script of a training

The package may import all other packages. It imports the services' packages, which need torch or a server, only when a
command needs them.
"""
