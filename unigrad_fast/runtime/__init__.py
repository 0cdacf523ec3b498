"""Foundation of all parts: process group, precision, errors, checked trees of values, quiet imports."""
