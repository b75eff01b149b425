"""EC2, Auto Scaling, prices and quotas: moto behind a layer that adds what it lacks."""
