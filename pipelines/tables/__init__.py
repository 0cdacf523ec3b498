"""Images in rows of Arrow and Parquet files: finds files, columns and labels, and where in the files the images are."""
