"""`python -m replayssm` is the `replayssm` command."""

from replayssm.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
