"""EC2, Auto Scaling, prices and quotas: moto with a layer for what it lacks."""
