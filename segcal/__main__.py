"""``python -m segcal`` is the ``segcal`` command."""

from segcal.commands.main import app

if __name__ == "__main__":
    app(prog_name="segcal")
