"""What has to stay, and removing the rest: behind a running query's back, and from outside."""
