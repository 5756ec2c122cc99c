"""From files to arrays: manifests, tokenizer, media, and the index of a data set."""
