"""The ground floor: reading and writing of JSON, TOML and files, and the one bitwise comparison."""
