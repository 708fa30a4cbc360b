"""The launcher, which starts the processes of one machine and starts them again."""
