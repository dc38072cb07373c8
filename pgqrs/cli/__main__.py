"""`python -m pgqrs.cli` is `pgqrs`, also where the script is not on the PATH."""

from pgqrs.cli import main

if __name__ == "__main__":
    main()
