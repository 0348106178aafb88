"""Configurations that come with zerokl, one TOML file each."""
