"""Users' own models, datasets, losses and samplers: `register`, and the dataclasses that build them."""
