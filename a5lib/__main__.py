"""`python -m a5lib` is the same as `a5`."""

from a5lib.cli import main

if __name__ == "__main__":
    main()
