"""Files as they lie on the disk: headers of images, archives, descriptors that stay open, slow storage."""
