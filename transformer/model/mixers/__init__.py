"""Token mixers, used only through the interface of `Mixer`. To add one, add a file here."""
