"""Rules for namespaces: what each may use of a service, and what its answers may reveal."""
