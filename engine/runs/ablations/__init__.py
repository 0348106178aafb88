"""`zerokl ablate`: grids of runs over settings and seeds."""
