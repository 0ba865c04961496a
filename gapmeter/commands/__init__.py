"""The commands by what they are about: measuring, recorded runs, and what there is to work with."""
