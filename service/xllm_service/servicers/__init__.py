"""One servicer per service of the contract: thin, from message to engine and back."""
