"""The measurements of `unigrad-fast bench`. Modules `…_blocks` contain the code that runs in measured processes."""
