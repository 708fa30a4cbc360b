"""What a step is: state, loss, gradients, precision, averages, and the step made of them."""
