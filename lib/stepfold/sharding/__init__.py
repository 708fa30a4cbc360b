"""Where arrays live: meshes, rules, and what is placed by them."""
