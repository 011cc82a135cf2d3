"""The checks of `weft doctor`: what this machine supports, and what would silently disable overlap.

`diagnose` runs all of them. Nothing here prints. Code that may crash or hang (a driver, a library) runs in a
child process.
"""

from weft.doctor.check import Check
from weft.doctor.suite import diagnose, next_step

__all__ = ["Check", "diagnose", "next_step"]
