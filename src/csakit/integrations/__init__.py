"""csakit inside other libraries' models. Each integration is a module of its own and imports its library when it is used."""
