"""The parts of a run, each made by a function of the arguments."""
