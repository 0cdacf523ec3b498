"""What every part stands on: process group, precision, errors, checked trees of values, quiet imports."""
