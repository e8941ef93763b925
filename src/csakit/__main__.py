"""`python -m csakit` is the `csakit` command."""

from csakit.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
