"""Run :mod:`tests.fuzz.settings`; processes cannot import functions of a main module."""

from tests.fuzz.settings import main

if __name__ == "__main__" and main()["failing"]:
    raise SystemExit(1)
