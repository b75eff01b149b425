"""How facts enter the state: `fold`, and the checks of requests that it applies."""
