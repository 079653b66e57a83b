"""Files that may not be read: for a test that runs as root too, which may otherwise read
everything.
"""

from __future__ import annotations

import ctypes

# capset(2): CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
_VERSION_3, _READS_EVERYTHING = 0x20080522, 0b110


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def obey() -> None:
    """From now on this process, and only this one, obeys the modes of files, as one that is not
    root does.
    """
    libc, header, data = ctypes.CDLL(None), _Header(_VERSION_3, 0), (_Data * 2)()
    assert libc.capget(ctypes.byref(header), data) == 0
    data[0].effective &= ~_READS_EVERYTHING
    data[0].permitted &= ~_READS_EVERYTHING
    assert libc.capset(ctypes.byref(header), data) == 0
