"""What an audit shows: the page, the tables of the terminal, the summary in Markdown."""
