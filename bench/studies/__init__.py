"""Hit rates: what models, agents, tenants and routers find cached."""
