"""`python -m asyncrl` is the command line, like the program `asyncrl`."""

from asyncrl.cli.main import main

if __name__ == "__main__":
    main()
