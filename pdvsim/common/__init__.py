"""What every command needs: files, lines on standard error, progress."""
