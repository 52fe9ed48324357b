from gristmill_api.server import main

main()
