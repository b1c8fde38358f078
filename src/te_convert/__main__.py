"""``python -m te_convert``: the command line."""

from te_convert.cli.main import main

if __name__ == "__main__":
    main()
