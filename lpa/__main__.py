"""`python -m lpa` is the `lpa` command."""

from .cli import main

main()
