"""`python -m shardfold` is the command `shardfold`."""

from shardfold.tools.entry import main

if __name__ == "__main__":
    main()
