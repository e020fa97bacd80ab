"""The processes of this test's cluster, which others on the machine must not be taken for."""

import psutil


def processes(name: str) -> list[psutil.Process]:
    """What runs under this process with that name in its command line, Ray's workers included."""
    return [process for process in psutil.Process().children(recursive=True) if name in command_line(process)]


def command_line(process: psutil.Process) -> str:
    """Empty for one that has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
