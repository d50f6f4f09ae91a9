"""Plain helpers below every other package: files, the machine, event loops and threads, texts, progress, passes."""
