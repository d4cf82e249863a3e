"""The processes of the engines that are measured, and the S3 server for their state."""
