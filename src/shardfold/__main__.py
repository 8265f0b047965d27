"""`python -m shardfold` is the command `shardfold`."""

from shardfold.entry import main

if __name__ == "__main__":
    main()
