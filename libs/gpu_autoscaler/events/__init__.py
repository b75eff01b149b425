"""Facts: what happened, in the past tense. One file a domain; the catalogue is the list of all of them."""
