"""Makes `python -m swiftjax.cli` the same as the installed script."""

from swiftjax.cli import main

if __name__ == "__main__":
    main()
