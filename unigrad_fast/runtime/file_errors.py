"""What to do about errors of the file system: each has its own remedy."""

from __future__ import annotations

import errno

_MOUNT = "mount its file system again, or check the connection to the storage"
_REMEDIES = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "remove files of yours until your quota allows more (`quota -s`)",
    errno.EFBIG: "raise the limit on file sizes (`ulimit -f`)",
    errno.EROFS: "mount its file system writable, or write elsewhere",
    errno.EACCES: "change its permissions, or write elsewhere",
    errno.EPERM: "change its permissions, or write elsewhere",
    errno.EIO: "check the disk and the connection to it (`dmesg`)",
    errno.EREMOTEIO: "check the disk and the connection to it (`dmesg`)",
    errno.ENODEV: "check the disk and the connection to it (`dmesg`)",
    errno.ENXIO: "check the disk and the connection to it (`dmesg`)",
    errno.ESTALE: _MOUNT,
    errno.ENOTCONN: _MOUNT,
    errno.ESHUTDOWN: _MOUNT,
    errno.EHOSTDOWN: _MOUNT,
    errno.EHOSTUNREACH: _MOUNT,
    errno.ENETUNREACH: _MOUNT,
    errno.ETIMEDOUT: _MOUNT,
}
WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
STORAGE = tuple(_REMEDIES.keys() - {*WRITING})  # while something is read, too


def remedy(error: OSError) -> str:
    """What the user can do, in the imperative."""
    return _REMEDIES.get(error.errno or 0, "check the storage")
