"""`python -m hpstore`: the `hpstore` command, where its script is not on PATH."""

from hpstore.cli import main

if __name__ == "__main__":
    main()
