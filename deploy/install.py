"""python3 deploy/install.py: this clone in a virtual environment, .venv, as make run and make test need it.

Any Python 3 can run this file, before anything is installed. What is missing is said in one line.
"""

import configparser
import importlib.util
import os
import subprocess
import sys

EXTRAS = "test,serve,text"
PYTHON = os.path.join(".venv", "bin", "python")


def main():
    settings = configparser.ConfigParser()
    settings.read("setup.cfg")
    check_python(sys.version_info[:2], settings["options"]["python_requires"].replace(">=", ""))
    run("install what is named there, or remove .venv", sys.executable, "-m", "venv", ".venv")
    run("see to a package index that pip reaches", PYTHON, "-m", "pip", "install", "-q", "-e", f".[{EXTRAS}]")


def check_python(version, needed):
    """Checks that this Python, of a version such as (3, 11), is new enough and makes virtual environments."""
    if version < tuple(map(int, needed.split("."))):
        stop(f"python3: version={version[0]}.{version[1]}, expected {needed} or newer; install one, first on PATH")
    if not all(map(importlib.util.find_spec, ("venv", "ensurepip"))):
        stop("python3: no module ensurepip, expected it to make .venv; install it with apt install python3-venv")


def run(fix, *command):
    """Runs a command, silent unless it fails: the first error in its output, or all of it, is then the cause."""
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        lines = [line.strip() for line in done.stdout.split("\n") if line.strip()] or [f"status={done.returncode}"]
        cause = next((line for line in lines if line.startswith("ERROR: ")), " ".join(lines))
        stop(f"{' '.join(command)}: {cause}, expected success; {fix}")


def stop(line):
    print(line, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        stop("interrupted")
