"""`zerokl report` and `zerokl watch`: one page for people, made from the files of runs and nothing else."""
