"""Files on the disk: image headers, archives, file descriptors that stay open, slow storage, whole files."""
