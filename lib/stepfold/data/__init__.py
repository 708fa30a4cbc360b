"""What a batch is: a function of an integer, made of examples."""
