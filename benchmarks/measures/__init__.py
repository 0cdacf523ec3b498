"""What `unigrad-fast bench` measures. A module `…_blocks` has what runs in the measured processes."""
