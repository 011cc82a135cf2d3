"""What this machine can do, and what would silently disable overlap: the checks of `weft doctor`.

`diagnose` runs them all; each subject has a file of its own. Nothing here prints, and anything that may crash
or hang (a driver, a library) runs in a child process.
"""

from weft.doctor.check import Check
from weft.doctor.suite import diagnose, next_step

__all__ = ["Check", "diagnose", "next_step"]
