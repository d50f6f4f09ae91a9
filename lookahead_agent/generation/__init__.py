"""One reply: what is asked, which policy it gets, and how it is written and read."""
